"""A small training job, from which programs and tests update the weights of inference ranks."""
