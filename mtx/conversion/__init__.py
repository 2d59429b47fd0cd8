"""Converts checkpoints of Hugging Face's format to ours and back."""
