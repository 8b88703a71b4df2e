"""Use ClairViT with captum, Quantus, pytorch-grad-cam, Lightning, TensorBoard, W&B, torchmetrics and datasets.

Nothing here is imported by `import clairvit`, and each module imports the package that it is for only when it is used.
"""
