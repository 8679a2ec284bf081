"""The settings of the caching allocator as PYTORCH_CUDA_ALLOC_CONF writes them, as torch 2.13 reads them."""

import pytest

from overspill.core.errors import RequestError
from overspill.placement import CachingConfig

MIB = 1 << 20


def test_no_settings_are_the_defaults() -> None:
    assert CachingConfig.parse("") == CachingConfig()


def test_settings_are_separated_by_commas_and_spaces_do_not_matter() -> None:
    config = CachingConfig.parse(
        "max_split_size_mb: 128, garbage_collection_threshold:0.8,expandable_segments:True,"
        "max_non_split_rounding_mb:64,large_segment_size_mb:32,per_process_memory_fraction:0.5,"
    )
    assert config == CachingConfig(
        max_split_bytes=128 * MIB,
        garbage_collection_threshold=0.8,
        expandable_segments=True,
        max_non_split_rounding_bytes=64 * MIB,
        large_segment_bytes=32 * MIB,
        per_process_memory_fraction=0.5,
    )


def test_one_number_of_divisions_is_for_all_sizes() -> None:
    assert CachingConfig.parse("roundup_power2_divisions:4").roundup_power2_divisions == (4,) * 16


def test_a_list_of_divisions_is_by_size_in_mebibytes() -> None:
    table = CachingConfig.parse("roundup_power2_divisions:[256:1,512:2,>:8]").roundup_power2_divisions
    # Everything below the first size has its divisions; from the last size on, those of ">".
    assert table == (*(1,) * 9, *(8,) * 7)
    table = CachingConfig.parse("roundup_power2_divisions:[4:2,16:8]").roundup_power2_divisions
    assert table == (2, 2, 2, 0, 8, *(0,) * 11)


def test_settings_without_influence_on_placement_are_accepted() -> None:
    text = "backend:native,pinned_use_background_threads:True,expandable_segments:True"
    assert CachingConfig.parse(text) == CachingConfig(expandable_segments=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_split_size_mb:19", "max_split_size_mb is 19 but must be at least large_segment_size_mb, 20"),
        ("large_segment_size_mb:64,max_split_size_mb:32", "max_split_size_mb is 32 but must be at least"),
        ("max_non_split_rounding_mb:10", "max_non_split_rounding_mb is 10 but must be at least"),
        ("large_segment_size_mb:10", "large_segment_size_mb must be a whole number above 10, not 10"),
        (
            "large_segment_size_mb:11,expandable_segments:True",
            "expandable_segments needs an even large_segment_size_mb",
        ),
        ("garbage_collection_threshold:1.0", "garbage_collection_threshold must be between 0 and 1, not 1"),
        ("garbage_collection_threshold:much", "must be a number between 0 and 1, not 'much'"),
        ("garbage_collection_threshold:nan", "must be between 0 and 1, not nan"),
        ("per_process_memory_fraction:0", "per_process_memory_fraction must be above 0"),
        ("roundup_power2_divisions:3", "roundup_power2_divisions takes powers of 2, not 3"),
        ("roundup_power2_divisions:[100:1]", "roundup_power2_divisions takes powers of 2, not 100"),
        ("roundup_power2_divisions:[1:2,2:4", "the list of roundup_power2_divisions has no end"),
        ("roundup_power2_divisions:[1]", "'1' is not of the form size:divisions"),
        ("expandable_segments:true", "expandable_segments must be True or False, not 'true'"),
        ("max_split_size_mb", "'max_split_size_mb' is not of the form key:value"),
        ("max_split_size_mb:", "'max_split_size_mb:' is not of the form key:value"),
        ("max_split_size_mb:abc", "max_split_size_mb must be a whole number, not 'abc'"),
        ("max_split_size_mb:٤٠", "max_split_size_mb must be a whole number, not '٤٠'"),
        ("garbage_collection_threshold:0.٢", "must be a number between 0 and 1, not '0.٢'"),
        ("max_split_size:128", "has no setting 'max_split_size'; did you mean 'max_split_size_mb'"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        CachingConfig.parse(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_default_rounding_goes_with_any_segment_size() -> None:
    assert CachingConfig.parse("large_segment_size_mb:64").max_non_split_rounding_bytes == 20 * MIB


def test_unknown_tie_breaks_and_tables_of_another_length_are_refused() -> None:
    with pytest.raises(RequestError, match="tie_break"):
        CachingConfig(tie_break="newest")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="needs 16 numbers, not 2"):
        CachingConfig(roundup_power2_divisions=(1, 2))
