"""Checkpoints: files to configuration, tensors, tokenizer and chat template."""
