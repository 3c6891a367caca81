from tests.launch.conftest import started  # noqa: F401
