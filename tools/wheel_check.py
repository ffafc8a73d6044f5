"""Builds sdist and wheel, and uses the wheel in a virtual environment that has nothing else of us.

    python tools/wheel_check.py

The sdist is built first and the wheel from the sdist, so a file that the sdist forgets is missing
from the wheel. twine reads the metadata of both as a package index does. torch and the other
dependencies come from the interpreter that runs this: they are large, and not what is checked.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "convt3d"
SDIST_NEEDS = ("README.md", "LICENSE", "CHANGELOG.md", "Makefile", "mkdocs.yml", "pyproject.toml")
RECORDS = "docs/results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=pathlib.Path, help="also put both files here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        sdist, wheel = build(arguments.keep or work / "dist")
        run([sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)])
        check_sdist(sdist)
        check_wheel(wheel)
        use(wheel, work)
    print(f"{sdist.name} and {wheel.name}: complete, and the wheel works on its own")


def build(out: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """The sdist of the tree, and the wheel of that sdist."""
    run([sys.executable, "-m", "build", "--outdir", str(out), str(ROOT)])
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def check_sdist(sdist: pathlib.Path) -> None:
    """Whoever has the sdist can run the tests and build the documentation.

    Records of measurements stay out: tests that read them are skipped there, and pages name them.
    """
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = ("src", "tests", "docs", "examples", "tools", "kernelbench")
    tracked = run(["git", "-C", str(ROOT), "ls-files", *folders]).splitlines()
    needed = {name for name in tracked if not name.startswith(RECORDS)}
    missing = sorted({*needed, *SDIST_NEEDS} - names)
    if missing:
        sys.exit(f"{sdist.name} lacks {missing}")
    surplus = sorted(name for name in names if name.startswith(RECORDS))
    if surplus:
        sys.exit(f"{sdist.name} has records of measurements: {surplus}")


def check_wheel(wheel: pathlib.Path) -> None:
    """Every file of the package is in it, kernels and the marker of typing among them."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    wanted = {
        path.relative_to(PACKAGE.parent).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert any(name.endswith(".cu") for name in wanted)
    missing = sorted(wanted - names)
    if missing:
        sys.exit(f"{wheel.name} lacks {missing}")
    top = {name.partition("/")[0] for name in names}
    if {name for name in top if not name.endswith(".dist-info")} != {"convt3d"}:
        sys.exit(f"{wheel.name} installs more than the package: {sorted(top)}")


def use(wheel: pathlib.Path, work: pathlib.Path) -> None:
    """``doctor``, ``explain``, ``export`` and the quick benchmark, by the installed command."""
    home = work / "venv"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)])
    # Behind the environment's own folder on sys.path: what the wheel has comes from the wheel.
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = pathlib.Path(run([str(python), "-c", code]).strip())
    borrowed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (own / "borrowed.pth").write_text("\n".join(borrowed))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["CONVT3D_CACHE_DIR"] = str(work / "cache")
    environment.setdefault("OMP_NUM_THREADS", "1")  # steady where cores are shared

    def ask(*command: str) -> str:
        return run([str(home / "bin" / command[0]), *command[1:]], cwd=work, env=environment)

    place = ask("python", "-c", "import convt3d; print(convt3d.__file__)")
    if home.resolve() not in pathlib.Path(place.strip()).resolve().parents:
        sys.exit(f"convt3d was imported from {place}, not from the wheel")
    findings = json.loads(ask("convt3d", "doctor", "--json"))
    if findings["self-test"]["ok"] is not True:
        sys.exit(f"doctor: {findings['self-test']['text']}")
    print(ask("convt3d", "doctor"))
    ask("convt3d", "explain", "kb61", "--device", "cuda")
    ask("convt3d", "export", "--shape", "kb61", "-o", str(work / "model_new.py"))
    compile((work / "model_new.py").read_text(), "model_new.py", "exec")
    print(ask("convt3d", "bench", "--quick", "--budget", "0.05"))


def run(command: list[str], **options: object) -> str:
    """What a command prints; ends with its messages if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, **options)  # type: ignore[call-overload]
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return str(done.stdout)


if __name__ == "__main__":
    main()
