"""Uses of a trained model: text generated from prompts, and measures of quality."""
