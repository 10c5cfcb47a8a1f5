"""Print the README's one-line shell command that contains a word: so that what is promised there is what runs."""

import re
import sys
from pathlib import Path


def commands(readme: str) -> list[str]:
    """Lines of all bash blocks, without comments."""
    blocks = re.findall(r"^```bash\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines() if line and not line.startswith("#")]


if __name__ == "__main__":
    found = [line for line in commands(Path("README.md").read_text(encoding="utf-8")) if sys.argv[1] in line]
    if len(found) != 1:
        sys.exit(f"README.md has {len(found)} commands with {sys.argv[1]!r}, expected one")
    print(found[0])
