"""Model families, one folder each, and what they share."""
