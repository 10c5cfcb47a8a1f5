"""TODO model_executor."""
