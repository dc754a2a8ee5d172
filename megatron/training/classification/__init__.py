"""What a ViT and a BERT that tell classes have of their own, and what they share."""
