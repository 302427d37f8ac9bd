"""The one exception of the loaders: a model file that cannot be used, said in one sentence."""


class ModelFileError(ValueError):
    """A model, its tokenizer or its chat template cannot be used; the message has the value, the rule, the way out."""
