"""Fine-tune models: data loading, augmentation, checkpoints and the training loop."""
