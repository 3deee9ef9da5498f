"""A small training job, which programs and tests update the weights of inference ranks from."""
