"""Load models from timm, transformers, torchvision, open_clip, files and the user's own modules."""
