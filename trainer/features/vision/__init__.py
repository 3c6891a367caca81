"""Models of images: their classification, preparation and families."""
