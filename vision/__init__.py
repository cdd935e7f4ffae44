"""Vision: image classification and 3D segmentation."""
