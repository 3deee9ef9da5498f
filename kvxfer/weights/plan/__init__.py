"""The plan of a weight update, a pure function of its weight map: `schedule.plan_weights`."""
