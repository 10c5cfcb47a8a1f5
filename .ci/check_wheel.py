"""A wheel has to hold every file of the package that git tracks: models, kernel sources, py.typed; and all kernels.

Those are compiled into it for x86-64, where there is a compiler.
"""

import runpy
import subprocess
import sys
import zipfile

wheel = set(zipfile.ZipFile(sys.argv[1]).namelist())
tracked = subprocess.run(["git", "ls-files", "src"], check=True, capture_output=True, encoding="utf-8").stdout.split()
missing = [path for path in tracked if path.removeprefix("src/") not in wheel]
if missing:
    sys.exit(f"the wheel lacks {len(missing)} files: {', '.join(missing[:10])}")
kernels = runpy.run_path("src/sakiyomi/kernels/variants.py")
if kernels["distributed"]() and kernels["compiler"]() is not None:
    there = [path.rpartition("/")[2].rpartition("-")[0] for path in wheel if path.endswith(".so")]
    if sorted(there) != sorted(map(kernels["stem"], kernels["VARIANTS"])):
        sys.exit(f"the wheel has the kernels {', '.join(sorted(there))}, expected {', '.join(kernels['VARIANTS'])}")
print(f"{sys.argv[1].rsplit('/', 1)[-1]}: {len(tracked)} files")
