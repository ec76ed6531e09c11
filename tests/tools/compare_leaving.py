"""Take trainings to other libraries and back, and compare them bit by bit: the table of docs/leaving.md.

    python -m tests.tools.compare_leaving            # print the table, after some minutes
    python -m tests.tools.compare_leaving --write    # put it in the page

`tests/checkpoint/test_leaving.py` runs a sample of the same trainings, and compares each with its row.
"""

from __future__ import annotations

import argparse


def main() -> None:
    # Ranks import this module first, and helpers after pytest has prepared their asserts.
    from tests.helpers.leaving_table import table, write

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table in docs/leaving.md")
    options, new = parser.parse_args(), table()
    if options.write:
        write(new)
    else:
        print(new)


if __name__ == "__main__":
    main()
