"""Integrations with the training loops of Hugging Face and Lightning."""
