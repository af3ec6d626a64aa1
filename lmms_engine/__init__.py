"""One engine, many recipes: training of large multimodal models. Importing it has no side effects."""

__version__ = "0.1.0"
