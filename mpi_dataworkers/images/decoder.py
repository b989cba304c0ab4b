"""From a file's bytes to an image: by `decoder.cpp` where it can be compiled and has Pillow's pixels, else by Pillow.

Native code has the plain JPEG files. It uses the libjpeg-turbo that Pillow has loaded, which decodes as Pillow does.
Whatever else a file is, or has wrong with it, is Pillow's: the pixels are the same, and so are the errors.
"""

from __future__ import annotations

import ctypes
import functools
import io
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hetstream.base.installed import install_command
from hetstream.mpi_dataworkers.compiling import compiled, compiler
from hetstream.mpi_dataworkers.errors import SourceError
from hetstream.mpi_dataworkers.images.recipes import NHWC, Output, Window

if TYPE_CHECKING:
    from PIL import Image

_log = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("decoder.cpp")
# In the order of `Functions`.
_FUNCTIONS = (
    *("jpeg_std_error", "jpeg_CreateDecompress", "jpeg_mem_src", "jpeg_read_header", "jpeg_start_decompress"),
    *("jpeg_crop_scanline", "jpeg_skip_scanlines", "jpeg_read_scanlines", "jpeg_destroy_decompress"),
)
# Versions of libjpeg's interface that libjpeg-turbo is built with, and the bytes of their structure.
_INTERFACES = ((62, 632), (80, 656), (62, 656))
# Modes whose pixels do not fit 8 bits: Pillow would clip them to white without a word.
_DEEP_MODES = ("I", "F")
_JPEG = b"\xff\xd8"


def pillow_image() -> Any:
    """Pillow's `Image`, from where images are decoded: loaders and data workers of all other data do without it.

    Raises:
        ImportError: it is not installed; how to is said.
    """
    try:
        from PIL import Image
    except ImportError as exc:
        raise ImportError(f"images need Pillow, which is not installed: {install_command('images')}") from exc
    return Image


class Wanted(ctypes.Structure):
    """`Wanted` of decoder.cpp: what one call makes. Addresses are numbers here."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("left", "top", "width", "height", "made_width", "made_height", "first_column", "first_row"),
            *("num_columns", "num_rows", "flip", "may_scale", "rows_may_be_first"),
            *("row_step", "column_step", "channel_step", "normalise", "result"),
        )
    )


class Native(NamedTuple):
    """The functions of decoder.cpp.

    Attributes:
        library: they.
        interface: the version of libjpeg's, and the bytes of its structure.
        rows_may_be_first: whether Pillow resizes a tall image's rows before its columns, as it does from 12 on.
    """

    library: Any
    interface: tuple[int, int]
    rows_may_be_first: bool

    def make(self, opened: int, window: Window, output: Output, is_exact: bool, address: int) -> bool:
        """Put the image that `window` says to an address; whether native code could."""
        normalise = (ctypes.c_float * 7)(*output.normalise)
        wanted = Wanted(
            *window[:8], output.size, output.size, window.flip, not is_exact, self.rows_may_be_first, *output.steps,
            ctypes.addressof(normalise) if output.dtype == torch.float32 else 0, address,
        )  # fmt: skip
        return bool(self.library.hetstream_jpeg_make(opened, ctypes.byref(wanted)))


@functools.cache
def native() -> Native | None:
    """The functions of decoder.cpp; None, and a line in the log, where they cannot be had or decode otherwise."""
    try:
        return _native()
    except (OSError, AttributeError) as error:
        _log.warning("images: decoded by Pillow, pixel for pixel the same but slower: %s", error)
        return None


def _native() -> Native:
    """The functions of decoder.cpp, tried out.

    Raises:
        OSError: they cannot be compiled, or do not decode as Pillow.
        AttributeError: Pillow's libjpeg lacks a function.
    """
    path = compiler()
    if path is None:
        raise OSError("no C++ compiler (g++, clang++) on this host")
    if sys.byteorder != "little":
        raise OSError("native code is for hosts of little endian")
    # What the library of Pillow itself is linked with, wherever that lies.
    pillow = ctypes.CDLL(pillow_image().core.__file__)
    functions = (ctypes.c_void_p * len(_FUNCTIONS))(
        *(ctypes.cast(getattr(pillow, name), ctypes.c_void_p).value for name in _FUNCTIONS)
    )
    library = compiled(path, _SOURCE)
    library.hetstream_jpeg_use.argtypes = [ctypes.c_void_p]
    library.hetstream_jpeg_use.restype = None
    library.hetstream_jpeg_open.argtypes = [
        ctypes.c_int,
        ctypes.c_int64,
        ctypes.c_char_p,
        ctypes.c_int64,
        ctypes.c_void_p,
    ]
    library.hetstream_jpeg_open.restype = ctypes.c_void_p
    library.hetstream_jpeg_make.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.hetstream_jpeg_make.restype = ctypes.c_int
    library.hetstream_jpeg_close.argtypes = [ctypes.c_void_p]
    library.hetstream_jpeg_close.restype = None
    library.hetstream_jpeg_use(functions)
    for interface in _INTERFACES:
        for rows_may_be_first in (True, False):
            found = Native(library, interface, rows_may_be_first)
            if _decodes_as_pillow(found):
                return found
    raise OSError("the libjpeg of Pillow is none that native code can use, or Pillow resizes in another way")


def _decodes_as_pillow(found: Native) -> bool:
    """Whether native code gives Pillow's pixels, of a crop in a file whose colours are subsampled."""
    noise = torch.randint(0, 256, (230, 70, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pillow, file = pillow_image(), io.BytesIO()
    pillow.fromarray(noise.numpy()).resize((140, 460)).save(file, "JPEG", quality=90, subsampling=2)
    output = Output(32, torch.uint8, NHWC, (0, 0, 0), (1, 1, 1))
    for window in (Window(21, 33, 100, 401, 32, 32, flip=True), Window(40, 9, 99, 61, 48, 48, 7, 9)):
        made = torch.empty(output.shape, dtype=torch.uint8)
        expected = torch.empty_like(made)
        data = file.getvalue()
        opened, _, _ = _opened(found, data)
        try:
            if not opened or not found.make(opened, window, output, True, made.data_ptr()):
                return False
        finally:
            found.library.hetstream_jpeg_close(opened)
        with pillow.open(file) as image:
            _by_pillow(image, window, output, expected)
        if not torch.equal(made, expected):
            return False
    return True


def _opened(found: Native, data: bytes) -> tuple[int | None, int, int]:
    """What native code has of a file whose header it can read, and the image's width and height in pixels."""
    size = (ctypes.c_int64 * 2)()
    return found.library.hetstream_jpeg_open(*found.interface, data, len(data), size), size[0], size[1]


class Rules(NamedTuple):
    """How images are made.

    Attributes:
        output: in which form.
        is_exact: with Pillow's pixels, bit for bit.
        max_pixels: of a file.
    """

    output: Output
    is_exact: bool
    max_pixels: int


def make_image(
    path: str, data: bytes, window_of: Callable[[int, int], Window], rules: Rules, target: torch.Tensor
) -> None:
    """Make an image of a file.

    Args:
        path: of the file, for errors.
        data: its bytes.
        window_of: what is wanted of an image of so many pixels, width and height; called once.
        rules: how it is made.
        target: where to, in the form that they say, contiguous.

    Raises:
        SourceError: the file is damaged, no image, too large, or has more than 8 bits a channel.
    """
    found = native() if data.startswith(_JPEG) else None
    window = None
    if found is not None:
        opened, width, height = _opened(found, data)
        try:
            if opened:
                window = _window(path, width, height, window_of, rules)
                if found.make(opened, window, rules.output, rules.is_exact, target.data_ptr()):
                    return
        finally:
            found.library.hetstream_jpeg_close(opened)
    pillow = pillow_image()
    try:
        with pillow.open(io.BytesIO(data)) as image:
            if image.mode.startswith(_DEEP_MODES):
                text = f"mode {image.mode} has more than 8 bits a channel; convert the file to 8 bits"
                raise SourceError.of(path, text)
            window = window or _window(path, image.width, image.height, window_of, rules)
            _by_pillow(image, window, rules.output, target)
    except SourceError:
        raise
    except pillow.UnidentifiedImageError as exc:
        text = f"is no image that Pillow knows ({len(data):,} bytes). Replace or remove the file"
        raise SourceError.of(path, text) from exc
    except Exception as exc:  # Pillow's plugins raise what they come across
        raise SourceError.of(path, f"cannot be decoded: {exc}. Replace or remove the file") from exc


def _window(path: str, width: int, height: int, window_of: Callable[[int, int], Window], rules: Rules) -> Window:
    """What is wanted of an image.

    Raises:
        SourceError: it is larger than it may be, as it is or resized.
    """
    window = window_of(width, height) if width * height <= rules.max_pixels else None
    if window is None or window.made_width * window.made_height > rules.max_pixels:
        size = f"{width:,} x {height:,}"
        if window is not None:
            size += f", resized to {window.made_width:,} x {window.made_height:,}"
        text = (
            f"{size} pixels are more than max_pixels={rules.max_pixels:,}. Give ImageFolder more if you trust the file"
        )
        raise SourceError.of(path, text)
    return window


def _by_pillow(image: Image.Image, window: Window, output: Output, target: torch.Tensor) -> None:
    """What decoder.cpp does, as torchvision has Pillow do it."""
    pillow, size = pillow_image(), (window.made_width, window.made_height)
    right, bottom = window.left + window.width, window.top + window.height
    made = image.convert("RGB").crop((window.left, window.top, right, bottom)).resize(size, pillow.Resampling.BILINEAR)
    right, bottom = window.first_column + output.size, window.first_row + output.size
    made = made.crop((window.first_column, window.first_row, right, bottom))
    if window.flip:
        made = made.transpose(pillow.Transpose.FLIP_LEFT_RIGHT)
    pixels = torch.frombuffer(bytearray(made.tobytes()), dtype=torch.uint8)
    target.copy_(output.of(pixels.view(output.size, output.size, 3)))
