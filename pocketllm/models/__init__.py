"""Model families: one module each, named after its `model_type`."""
