"""Every mode and format of Pillow through the one decoder, as a record's picture and as an image of a pair."""

import io
import json
import re
import struct
from types import SimpleNamespace

from common.data import PromptSet
from common.errors import RunError
from common.files.pictures import FORMATS, StoredImage, find_images
from common.pairs.pair_files import read_pairs
from common.pairs.pairs import encode_pair
from common.rewards.preservation import preservation

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms

pytestmark = pytest.mark.fast

Image.init()
MODES = ["1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"]
WITH_16_BITS = ["I;16", "I;16L", "I;16B", "I;16N"]
MODES += ["I", "F", *WITH_16_BITS]
COLOUR = (204, 51, 102)  # of the palette that Pillow takes for a P
ORIENTATION = 0x0112
GREY = round(0.299 * 204 + 0.587 * 51 + 0.114 * 102)


def source(mode):
    """A picture of one colour in that mode; in modes with alpha its right half is transparent, over that colour."""
    if mode == "F" or mode.startswith("I"):
        kind = {"I": np.int32, "F": np.float32, "I;16B": ">u2"}.get(mode, np.uint16)
        return Image.frombytes(mode, (32, 20), np.full((20, 32), GREY * 257, dtype=kind).tobytes())
    image = Image.new("RGB", (32, 20), COLOUR)
    if mode.upper().endswith("A"):
        opaque = Image.new("L", image.size, 0)
        opaque.paste(255, (0, 0, 16, 20))
        image.putalpha(opaque)
    return image.convert("LA").convert(mode) if mode == "La" else image.convert(mode)


def decode_as_both(folder, content):
    """The decoded picture, or the messages that refuse it before a pixel is read: of a record and of a pair."""
    (folder / "a").write_bytes(content)
    Image.new("RGB", (32, 20)).save(folder / "black.png")
    (folder / "pairs.jsonl").write_text(json.dumps({"prompt": "p", "chosen": "a", "rejected": "black.png"}))
    decoded = []
    model = SimpleNamespace(
        encode_images=lambda images, *size: decoded.append(images[0]) or torch.zeros(2, 1), encode=lambda *given: {}
    )

    def of_a_record():
        decoded.append(find_images("image", "a", folder / "edits.jsonl", "edits.jsonl:1")[0].decode())

    def of_a_pair():
        encode_pair(model, read_pairs(folder)[0], folder / "pair.pt", (32, 32), 16)

    faults = []
    for use in (of_a_record, of_a_pair):
        try:
            use()
        except (ValueError, RunError) as error:
            faults.append(str(error).split(f"{folder}/a: ")[1])
    if faults:
        assert len(faults) == 2 and faults[0] == faults[1] and not decoded
        return faults[0]
    assert [image.mode for image in decoded] == ["RGB", "RGB"]
    assert np.array_equal(*map(np.asarray, decoded))
    return decoded[0]


@pytest.mark.filterwarnings("ignore:IM image format is deprecated:DeprecationWarning")  # as long as Pillow has it
@pytest.mark.parametrize("name", sorted(Image.SAVE))
def test_every_mode_of_a_format_is_decoded_or_refused_by_name(tmp_path, name, monkeypatch):
    """No program is called over an EPS."""
    monkeypatch.setattr("subprocess.check_call", None)
    decoded = set()
    for mode in MODES:
        file = io.BytesIO()
        try:
            source(mode).save(file, name)
        except Exception:  # a mode that the format does not have, or a format that Pillow only reads by a plugin
            continue
        try:
            stored = Image.open(file)
        except Image.UnidentifiedImageError:
            assert decode_as_both(tmp_path, file.getvalue()).endswith(", ".join(FORMATS))
            continue
        found = decode_as_both(tmp_path, file.getvalue())
        if name not in (*FORMATS, "MPO"):
            assert found.endswith(", ".join(FORMATS))
        elif stored.mode in ("I", "F"):
            assert re.fullmatch(rf".* Pillow's .* {re.escape(stored.mode)}; .* 8 .* 16 .*", found)
        else:
            grey = mode in ("1", "L", "LA", "La") or mode.startswith("I") or stored.mode == "L"
            expected = np.full((20, 32, 3), GREY if grey else COLOUR, dtype=float)
            if stored.has_transparency_data:
                expected[:, 16:] = 255
            pixels = np.asarray(found, dtype=float)
            if mode == "1":  # dots, as bright in the mean
                pixels = pixels.mean()
            if stored.mode.startswith("I") or mode not in ("F", "I", *WITH_16_BITS):  # which Pillow clips as it saves
                assert np.abs(pixels - expected).mean() < 6, (mode, stored.mode)
                decoded.add(stored.mode)
    assert bool(decoded) == (name in (*FORMATS, "MPO"))


def photo(name, **options):
    """Red at the left, as the camera stored it, white at the right."""
    picture = Image.new("RGB", (40, 20), "white")
    picture.paste("red", (0, 0, 20, 20))
    file = io.BytesIO()
    picture.save(file, name, **options)
    return file.getvalue()


UPSIDE_DOWN = b"\x01\x12\0\x03\0\0\0\x01\0\x03\0\0"
TEXT_AS_RESOLUTION = b"\x01\x1a\0\x02\0\0\0\x04abc\0"
BROKEN_EXIF = b"Exif\0\0MM\0*\0\0\0\x08\0\x02" + UPSIDE_DOWN + TEXT_AS_RESOLUTION + b"\0\0\0\0"


def turned(value):
    exif = Image.Exif()
    exif[ORIENTATION] = value
    return exif


@pytest.mark.parametrize(
    ("content", "size", "red"),
    [
        *((photo(name, exif=turned(6)), (20, 40), (10, 5)) for name in ("JPEG", "PNG", "TIFF", "WEBP", "AVIF", "MPO")),
        (photo("JPEG", exif=turned(1)), (40, 20), (5, 10)),
        (photo("JPEG", exif=turned(9)), (40, 20), (5, 10)),
        *((photo(name, exif=b"Exif\0\0no header"), (40, 20), (5, 10)) for name in ("JPEG", "PNG", "WEBP")),
        *((photo(name, exif=BROKEN_EXIF), (40, 20), (35, 10)) for name in ("JPEG", "PNG", "WEBP")),
        (photo("MPO", save_all=True, append_images=[Image.new("RGB", (16, 16))]), (40, 20), (5, 10)),  # a preview
    ],
)
def test_a_photo_stands_upright_whatever_else_its_exif_says(tmp_path, content, size, red):
    found = decode_as_both(tmp_path, content)
    assert found.size == StoredImage("", content).size == size
    other = (size[0] - 1 - red[0], size[1] - 1 - red[1])
    for place, colour in ((red, (255, 0, 0)), (other, (255, 255, 255))):
        assert np.abs(np.asarray(found.getpixel(place)) - colour).max() < 25


def test_of_grey_with_16_bits_the_upper_8_are_taken(tmp_path):
    """One shade is transparent; the next shade is not."""
    shades = np.arange(32 * 20, dtype=np.uint16).reshape(20, 32) * 100
    file = io.BytesIO()
    Image.fromarray(shades).save(file, "PNG", transparency=6300)
    expected = shades // 256
    expected[1, 31] = 255
    assert (np.asarray(decode_as_both(tmp_path, file.getvalue())) == expected[..., None]).all()


@pytest.mark.parametrize("name", ["AVIF", "GIF", "PNG", "TIFF", "WEBP"])
def test_several_frames_are_refused(tmp_path, name):
    content = photo(name, save_all=True, append_images=[Image.new("RGB", (40, 20), "blue")])
    assert " 2 " in decode_as_both(tmp_path, content)


# ---- colour profiles -------------------------------------------------------------------------------------------------
def fixed(*numbers):
    return struct.pack(f">{len(numbers)}i", *(round(number * 65536) for number in numbers))


def make_profile(space, tags, connection="XYZ ", kind="mntr"):
    """An ICC profile, version 2, of tags {name: bytes}."""
    table, content, start = b"", b"", 132 + 12 * len(tags)
    for name, value in tags.items():
        value += bytes(-len(value) % 4)
        table += name.encode() + struct.pack(">II", start + len(content), len(value))
        content += value
    size = start + len(content)
    head = struct.pack(
        ">I4sI4s4s4s12s4s",
        size,
        b"lcms",
        0x02400000,
        kind.encode(),
        space.encode(),
        connection.encode(),
        bytes(12),
        b"acsp",
    )
    head = head.ljust(68, b"\0") + fixed(0.9642, 1.0, 0.8249)
    return head.ljust(128, b"\0") + struct.pack(">I", len(tags)) + table + content


def xyz(*numbers):
    return b"XYZ " + bytes(4) + fixed(*numbers)


def gamma(value):
    return b"curv" + bytes(4) + struct.pack(">IH", 1, round(256 * value))


WHITE = {"wtpt": xyz(0.9642, 1.0, 0.8249)}
RED, GREEN, BLUE = (0.4361, 0.2225, 0.0139), (0.3851, 0.7169, 0.0971), (0.1431, 0.0606, 0.7141)  # sRGB's, under D50


def rgb_profile(red=RED, green=GREEN, blue=BLUE, curve=None):
    curve = curve or gamma(2.2)
    curves = dict.fromkeys(("rTRC", "gTRC", "bTRC"), curve)
    return make_profile("RGB ", {**WHITE, "rXYZ": xyz(*red), "gXYZ": xyz(*green), "bXYZ": xyz(*blue), **curves})


def ink_profile():
    """Of CMYK, in whose colours ink of any kind is black: a table of 2 levels an ink, of Lab."""
    ramp = bytes(range(256))
    nodes = b"".join(bytes([0 if node else 255, 128, 128]) for node in range(16))
    table = b"mft1" + bytes(4) + bytes([4, 3, 2, 0]) + fixed(1, 0, 0, 0, 1, 0, 0, 0, 1) + 4 * ramp + nodes + 3 * ramp
    return make_profile("CMYK", {**WHITE, "A2B0": table}, "Lab ", "prtr")


SWAPPED = rgb_profile(red=GREEN, green=RED)
ADOBE = rgb_profile((0.6097, 0.3111, 0.0195), (0.2053, 0.6257, 0.0609), (0.1492, 0.0632, 0.7446), gamma(2.19921875))
LINEAR_GREY = make_profile("GRAY", {**WHITE, "kTRC": gamma(1.0)})
BUILT_IN = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def decoded(image, name="PNG", **options):
    file = io.BytesIO()
    image.save(file, name, **options)
    return StoredImage("x.png", file.getvalue()).decode()


@pytest.mark.parametrize(
    ("mode", "colour", "profile", "expected", "name"),
    [
        ("RGB", (255, 0, 0), SWAPPED, (0, 255, 0), "PNG"),
        ("RGB", (255, 0, 0), SWAPPED, (0, 255, 0), "TIFF"),
        ("RGB", (200, 30, 30), ADOBE, (233, 24, 24), "PNG"),
        ("RGB", (200, 30, 30), ADOBE, (233, 24, 24), "WEBP"),
        ("P", (255, 0, 0), SWAPPED, (0, 255, 0), "PNG"),
        ("RGBA", (255, 0, 0, 255), SWAPPED, (0, 255, 0), "PNG"),
        ("RGBA", (255, 0, 0, 0), SWAPPED, (255, 255, 255), "PNG"),
        ("L", 128, LINEAR_GREY, (188, 188, 188), "PNG"),
        ("LA", (128, 255), LINEAR_GREY, (188, 188, 188), "PNG"),
        ("L", 128, rgb_profile(curve=gamma(1.0)), (188, 188, 188), "PNG"),
        ("LA", (128, 255), rgb_profile(curve=gamma(1.0)), (188, 188, 188), "PNG"),
        ("LA", (128, 0), rgb_profile(curve=gamma(1.0)), (255, 255, 255), "PNG"),
        ("I;16", 128 * 257, LINEAR_GREY, (188, 188, 188), "PNG"),
        ("CMYK", (255, 0, 0, 0), ink_profile(), (0, 0, 0), "TIFF"),
        ("CMYK", (0, 0, 0, 0), ink_profile(), (255, 255, 255), "TIFF"),
    ],
)
def test_a_picture_has_the_colours_that_its_profile_says(mode, colour, profile, expected, name):
    if mode == "P":
        image = Image.new("RGB", (8, 4), colour).convert("P", palette=Image.Palette.ADAPTIVE)
    else:
        image = Image.new(mode, (8, 4), colour)
    options = {"lossless": True} if name == "WEBP" else {}
    found = decoded(image, name, icc_profile=profile, **options)
    assert found.mode == "RGB" and "icc_profile" not in found.info
    assert np.abs(np.subtract(found.getpixel((0, 0)), expected)).max() <= 3, found.getpixel((0, 0))


def parametric():
    """sRGB's curve, exactly."""
    return b"para" + bytes(4) + struct.pack(">HH", 3, 0) + fixed(2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)


def tabulated(count):
    """sRGB's curve as a table: HP's profile has 1024 numbers, small ones for the web have 26."""
    x = np.linspace(0, 1, count)
    y = np.where(x <= 0.04045, x / 12.92, ((x + 0.055) / 1.055) ** 2.4)
    return b"curv" + bytes(4) + struct.pack(f">I{count}H", count, *np.round(65535 * y).astype(int).tolist())


@pytest.mark.parametrize("profile", [BUILT_IN, *(rgb_profile(curve=tabulated(count)) for count in (1024, 26))])
def test_under_srgbs_own_profile_pixels_stay_to_the_bit(profile):
    pixels = np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    assert (np.asarray(decoded(Image.fromarray(pixels), icc_profile=profile)) == pixels).all()
    levels = np.arange(256, dtype=np.uint8)[None]
    curve = {"kTRC": parametric()}
    grey = decoded(Image.fromarray(levels), icc_profile=make_profile("GRAY", {**WHITE, **curve}))
    assert (np.asarray(grey) == levels[..., None]).all()


@pytest.mark.parametrize("profile", [b"no profile", BUILT_IN[:200], SWAPPED[:140], LINEAR_GREY])
def test_a_profile_that_cannot_be_used_is_said_once_and_the_pixels_stay(profile, capfd, monkeypatch):
    """Once for all pictures with that fault. The last is of grey, in a picture in RGB."""
    monkeypatch.setattr("common.files.pictures._reported", set())
    image = Image.new("RGB", (8, 4), (200, 30, 30))
    file = io.BytesIO()
    image.save(file, "PNG", icc_profile=profile)
    for name in ("one", "two"):
        assert StoredImage(name, file.getvalue()).decode().getpixel((0, 0)) == (200, 30, 30)
    lines = [line for line in capfd.readouterr().err.splitlines() if "profile" in line]
    assert len(lines) == 1 and lines[0].startswith("one: ")


def test_a_mask_has_no_colours():
    file = io.BytesIO()
    Image.new("L", (8, 4), 100).save(file, "PNG", icc_profile=LINEAR_GREY)
    record = {name: [StoredImage("x.png", file.getvalue())] for name in ("image", "mask")}
    (found,) = PromptSet(["a"], [record]).for_rewards()
    assert found["mask"][0].getpixel((0, 0)) == (100,) * 3 != found["image"][0].getpixel((0, 0))
    record["mask"][0] = StoredImage("x.png", file.getvalue())
    with pytest.raises(ValueError, match="100 of 255"):  # of the profile's colours it would pass for white
        preservation.check_metadata(record)
