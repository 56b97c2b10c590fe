"""Ask PyPI's advisory service about every pinned package: exit 1 where one has a known hole.

Which packages it could not say anything about is told, and so is that it could not be asked at
all, as where there is only a mirror of the index: neither says that a change is bad.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def main(pip_audit: str, constraints: str, report: str) -> int:
    """Run ``pip_audit`` on ``constraints``, leave its ``report``; return the exit code."""
    found = Path(report)
    found.unlink(missing_ok=True)
    options = ["--no-deps", "--disable-pip", "--format=json", f"--output={found}"]
    ran = subprocess.run(
        [pip_audit, "-r", constraints, *options],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    if not found.exists():
        sys.stdout.write(f"NOT AUDITED, pip-audit ended with {ran.returncode}:\n{ran.stderr}\n")
        return 0 if "requests.exceptions" in ran.stderr else 1
    packages = json.loads(found.read_text())["dependencies"]
    skipped = {p["name"]: p["skip_reason"] for p in packages if "skip_reason" in p}
    holes = [
        f"{package['name']} {package['version']}: {hole['id']}, mended in {hole['fix_versions']}"
        for package in packages
        for hole in package.get("vulns", ())
    ]
    lines = [f"{len(packages) - len(skipped)} of {len(packages)} packages audited", *holes]
    if skipped:
        lines.append(f"NOT AUDITED: {', '.join(skipped)}; as: {next(iter(skipped.values()))}")
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if holes else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
