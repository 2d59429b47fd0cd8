"""What a trained model is good for: text that goes on from a prompt, and measures of quality."""
