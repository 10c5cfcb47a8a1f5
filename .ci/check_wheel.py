"""A wheel has to hold every file of the package that git tracks: models, kernel sources, py.typed."""

import subprocess
import sys
import zipfile

wheel = set(zipfile.ZipFile(sys.argv[1]).namelist())
tracked = subprocess.run(["git", "ls-files", "src"], check=True, capture_output=True, text=True).stdout.split()
missing = [path for path in tracked if path.removeprefix("src/") not in wheel]
if missing:
    sys.exit(f"the wheel lacks {len(missing)} files: {', '.join(missing[:10])}")
print(f"{sys.argv[1].rsplit('/', 1)[-1]}: {len(tracked)} files")
