"""Sizes and times as people write and read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.core.errors import RequestError
from overspill.core.units import format_bytes, format_seconds, is_share, parse_bytes, size_between, size_enough


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("12GiB", 12 * 2**30),
        ("12GB", 12 * 10**9),
        ("500MiB", 500 * 2**20),
        ("1048576", 2**20),
        (1048576, 2**20),
        (2.0e9, 2 * 10**9),
        ("7B", 7),
        ("1.5GiB", 3 * 2**29),
        (".5KiB", 512),
        ("2k", 2048),
        ("3 M", 3 * 2**20),
        (" 12 gib ", 12 * 2**30),
        ("1TiB", 2**40),
        ("1TB", 10**12),
    ],
)
def test_a_size_is_read_in_the_unit_that_it_names(text: str | float, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    ("text", "nbytes"), [("0.5", 500), ("50%", 500), ("12.5%", 125), ("1.0", 1000), (0.25, 250), ("100 %", 1000)]
)
def test_a_share_is_taken_of_what_there_is(text: str | float, nbytes: int) -> None:
    assert is_share(text)
    assert parse_bytes(text, of_bytes=1000) == nbytes


@pytest.mark.parametrize(
    "text",
    ["12XB", "", " ", "-1GiB", "0", "0GiB", "abc", "GiB", "1e9", "1,5GiB", "nan", "12 Gi B", "٢GiB", "1.٢", "٢%"],
)
def test_what_is_no_positive_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(RequestError) as refusal:
        parse_bytes(text, of_bytes=1000)
    assert repr(text) in str(refusal.value)
    assert refusal.value.exit_code == 2


@pytest.mark.parametrize("text", ["0%", "0.0", "0.0001"])
def test_a_share_that_leaves_nothing_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="positive size"):
        parse_bytes(text, of_bytes=1000)


@pytest.mark.parametrize("text", ["0.5", "50%"])
def test_a_share_of_nothing_is_refused_with_an_example_that_works(text: str) -> None:
    with pytest.raises(RequestError, match="12GiB"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["12GiB", "1", "2.5", "0.5GiB", "", "junk"])
def test_a_size_is_not_taken_for_a_share(text: str) -> None:
    assert not is_share(text)


def test_a_number_beyond_every_machine_is_refused() -> None:
    with pytest.raises(RequestError):
        parse_bytes("9" * 400)


@given(st.integers(1, 2**30))
def test_whole_mebibytes_are_read_exactly(count: int) -> None:
    assert parse_bytes(f"{count}MiB") == count * 2**20


@given(st.integers(1, 2**50))
def test_a_written_size_reads_back_within_6_percent(nbytes: int) -> None:
    assert abs(parse_bytes(format_bytes(nbytes)) - nbytes) <= 0.06 * nbytes


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (-1536, "-1.5 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (65 * 2**18, "16.3 MiB"),
        (65 * 2**18 - 1, "16.2 MiB"),
        (12_133_283_021, "11.3 GiB"),
        (5 * 2**40, "5.0 TiB"),
        (3000 * 2**40, "3000.0 TiB"),
    ],
)
def test_a_size_is_written_in_binary_units_with_one_decimal(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.25, "1.25 s"), (90.0, "90.00 s"), (0.0031, "3.1 ms"), (12e-6, "12 µs"), (0.0, "0 µs")]
)
def test_a_time_is_written_in_the_unit_that_suits_it(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("least", "most", "text"),
    [
        (5 << 20, (5 << 20) + 7, "5MiB"),
        (11_960_000, 11_973_793, "11.41MiB"),
        (11_973_000, 11_973_793, "11.419MiB"),
        (11_973_793, 11_973_793, "11973793B"),
        (1000, 2000, "2000B"),
    ],
)
def test_a_size_between_two_is_as_short_as_it_can_be(least: int, most: int, text: str) -> None:
    assert size_between(least, most) == text
    assert least <= parse_bytes(text) <= most


@given(st.integers(1 << 20, 1 << 40), st.integers(0, 1 << 36))
def test_a_size_as_written_is_written_again_whatever_is_enough(least: int, more: int) -> None:
    text = size_between(least, least + more)
    if text.endswith("MiB"):
        assert size_between(1, parse_bytes(text)) == text


@pytest.mark.parametrize(
    ("nbytes", "text"), [(551 << 20, "551MiB"), ((551 << 20) + 1, "552MiB"), (11_960_000, "11.5MiB"), (999, "999B")]
)
def test_a_size_that_is_enough_is_short_and_little_more(nbytes: int, text: str) -> None:
    assert size_enough(nbytes) == text
    assert nbytes <= parse_bytes(text) <= 1.01 * nbytes
