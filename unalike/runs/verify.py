"""Compares the files of a run with the hashes that it wrote down."""

from pathlib import Path

from unalike.base.errors import UserError
from unalike.base.integrity import find_changes, read_manifest
from unalike.base.ledger import check_ledger
from unalike.engines.store import CheckpointError, check_digest, file_name, read_index
from unalike.runs.run_folder import RESULTS, Folder, hash_config, load_server_state


def verify(path: str | Path) -> tuple[list[str], int]:
    """Compare a run with its manifest; one that is not finished, with its last checkpoint.

    Nothing is changed.

    Args:
        path: the run's folder.
    Returns: what is missing or was changed, one sentence each, and how many files were compared.
    Raises: UserError where the folder holds no run, or nothing to compare with.
    """
    folder = Folder.open(Path(path))
    manifest = read_manifest(folder.path)
    if manifest is not None and (folder.path / RESULTS).exists():
        return find_changes(folder.path, manifest, manifest), len(manifest)
    if (folder.path / RESULTS).exists():
        raise UserError(
            f"{path} has no manifest.json: it was lost, or the run was made by an earlier version; "
            "there is nothing to compare with"
        )
    return _verify_checkpoint(folder)


def _verify_checkpoint(folder: Folder) -> tuple[list[str], int]:
    """Compare the files of the last checkpoint of a run with the hashes in the server's state."""
    entry = folder.path / "checkpoints" / "server" / "server"
    index = read_index(entry)
    if not index:
        raise UserError(f"{folder.path} has no checkpoint yet: there is nothing to compare with")
    server_file = entry / file_name(max(index))
    try:
        check_digest(server_file, index[max(index)])
        state = load_server_state(server_file)
    except CheckpointError as error:
        return [str(error)], 1
    problems = []
    count = 2  # the server's state and the ledger
    finished = state["federation"]["finished"]
    for store, name in ((folder.client_store, "clients"), (folder.archive, "archive")):
        try:
            store.check(finished, state["manifest"][name])
            count += len(store.manifest(finished))
        except CheckpointError as error:
            problems.append(str(error))
    try:
        check_ledger(folder.ledger, state["ledger"])
    except UserError as error:
        problems.append(str(error))
    if state["config"] != hash_config(folder.config):
        problems.append(f"{folder.path / 'config.yaml'} is not the one the run began with")
    baseline = state.get("baseline")
    if baseline is not None:
        count += 1
        if folder.read_baseline(baseline) is None:
            problems.append(f"{folder.path / 'alone.json'} is missing or was changed")
    return problems, count + 1
