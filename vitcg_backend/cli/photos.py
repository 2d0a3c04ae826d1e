"""Photographs: those a user names, or those that scikit-image ships inside its package; and a clip made from one."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["bundled_photographs", "load_photographs", "make_clip"]

# Colour photographs of different shapes. These files lie in the wheel; the rest of skimage.data would be downloaded.
BUNDLED = ("astronaut.png", "chelsea.png", "coffee.png", "hubble_deep_field.jpg", "rocket.jpg")


def bundled_photographs() -> list[Path]:
    """Paths of scikit-image's photographs, found without importing it.

    Raises:
        UserError: scikit-image is not installed, or ships none of them.
    """
    spec = importlib.util.find_spec("skimage")
    folders = [Path(place) / "data" for place in (spec.submodule_search_locations or ())] if spec else []
    paths = [folder / name for folder in folders for name in BUNDLED if (folder / name).is_file()]
    if not paths:
        raise UserError("the default photographs need scikit-image: pip install scikit-image, or give --images PATH")
    return paths


def load_photographs(paths: Sequence[Path]) -> dict[str, Image]:
    """Decode image files to RGB.

    Returns:
        Name -> picture, in the order of `paths`; a name met twice gets a number.

    Raises:
        UserError: a path that is not a file, or a file that is not a picture; or Pillow is missing.
    """
    pictures: dict[str, Image] = {}
    for path in paths:
        name, count = path.stem, 2
        while name in pictures:
            name, count = f"{path.stem}-{count}", count + 1
        pictures[name] = _load(path)
    return pictures


def _load(path: Path) -> Image:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise UserError("reading images needs Pillow (pip install pillow)") from None
    if not path.exists():
        raise UserError(f"--images: no such file: {path}")
    if not path.is_file():
        raise UserError(f"--images: not a file: {path} (give the image files themselves)")
    try:
        with Image.open(path) as picture:
            return picture.convert("RGB")
    except UnidentifiedImageError:
        raise UserError(f"--images: not an image that Pillow can read: {path}") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        # Pillow reports a damaged file by any of these, SyntaxError for a broken PNG included.
        raise UserError(f"--images: cannot read {path}: {' '.join(str(error).split())}") from None


def make_clip(picture: Image, num_frames: int = 8, zoom: float = 0.6) -> list[Image]:
    """A camera that pans across a photograph and moves in.

    Args:
        picture: the photograph.
        num_frames: frames to make.
        zoom: side of the last frame's window, as a share of the picture's; the first frame shows all of it.

    Returns:
        `num_frames` pictures of the photograph's size.
    """
    from PIL import Image

    width, height = picture.size
    frames = []
    for index in range(num_frames):
        progress = index / max(num_frames - 1, 1)
        share = 1 - (1 - zoom) * progress
        left = progress * (1 - share) * width  # ends in the lower right
        top = progress * (1 - share) * height
        box = (left, top, left + share * width, top + share * height)
        frames.append(picture.resize((width, height), Image.Resampling.BICUBIC, box=box))
    return frames
