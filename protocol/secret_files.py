"""Files that hold keys: read whole, within a limit, and warned of when other users can read them.

Owns reading and the sentences of its failures; never knows what a key looks like, and repeats nothing of the content. Used by
`frontend.key_files` and `protocol.curve_keys`.
"""

import logging
from pathlib import Path

logger = logging.getLogger(__name__)

_OTHERS_READ = 0o004


def read_ascii(path: str, option: str, max_bytes: int, is_secret: bool = True) -> str:
    """The text of the file that `option` (a flag) names. Raises ValueError with a sentence.

    A secret that others can read is a warning only: container runtimes mount secrets like that.
    """
    try:
        file = Path(path)
        if is_secret and file.stat().st_mode & _OTHERS_READ:
            name = option.removeprefix("--").replace("-", "_")
            logger.warning("%s_readable_by_others path=%s advice='chmod 600'", name, path)
        with file.open("rb") as stream:
            content = stream.read(max_bytes + 1)
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be read: {error.strerror}") from None
    if len(content) > max_bytes:
        raise ValueError(f"{option} {path} is larger than {max_bytes} bytes")
    try:
        return content.decode("ascii")
    except UnicodeDecodeError:
        raise ValueError(f"{option} {path} holds characters other than ASCII") from None
