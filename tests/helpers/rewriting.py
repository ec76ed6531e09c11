"""Import this to let pytest rewrite the asserts of tests in a process of a rank too: a failing one shows its values."""

import pytest

try:
    # Private to pytest (tried on 8.4 and 9.2); its public door, pytest.main, would collect and run tests.
    from _pytest.assertion import install_importhook
    from _pytest.config import get_config
except ImportError:  # a failing assert then shows its line, without values
    pass
else:
    install_importhook(get_config())
    pytest.register_assert_rewrite("tests.helpers.parity", "tests.helpers.equality")
