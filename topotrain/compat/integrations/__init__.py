"""The training loops of Hugging Face and Lightning."""
