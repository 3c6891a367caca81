from tests.tasks.conftest import tokenizer  # noqa: F401
