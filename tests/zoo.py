"""Trains all classes of the zoo in all forms, on two and on three ranks, beside the unsharded model.

    python -m tests.zoo                            # 180 classes of `transformers`, a quarter of an hour on two cores
    python -m tests.zoo Llama T5 --forms rows      # those whose names begin so, in one form

`tests/helpers/zoo.py` has the table. `make test` trains a class of every fifth family in one form
(`tests/integrations/test_transformers_zoo.py`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.helpers.ranks import RankError, RankPool
from tests.helpers.zoo import FORMS, names
from tests.integrations.test_transformers_zoo import train


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="what the classes' names begin with; default: all")
    parser.add_argument("--forms", nargs="+", default=FORMS, choices=FORMS)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 3], help="the numbers of ranks; default: 2 and 3")
    asked = parser.parse_args()
    chosen = [name for name in names() if name.startswith(tuple(asked.names) or "")]
    failed, count, start = 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        pool = RankPool(Path(folder))
        try:
            for size in asked.ranks:
                for name in chosen:
                    for form in asked.forms:
                        count += 1
                        try:
                            pool(size, timeout=240).run(train, [name], form)
                        except RankError as error:
                            failed += 1
                            print(f"{name}, {form}, {size} ranks: {error}\n", flush=True)
        finally:
            pool.close()
    print(f"{count - failed} of {count} trained as unsharded, in {time.monotonic() - start:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
