import datetime

import pytest
from openai_harmony import HarmonyEncoding, HarmonyEncodingName, load_harmony_encoding

from rose_dist.frontend.formats.harmony import HarmonyFormat
from rose_dist.frontend.formats.harmony_vocabulary import HarmonyVocabulary
from rose_dist.vocabulary import VARIABLE, find_ranks_file

TODAY = datetime.date(2025, 6, 28)


@pytest.fixture(scope="session")
def harmony() -> HarmonyFormat:
    return HarmonyFormat(today=lambda: TODAY)


@pytest.fixture(scope="session")
def vocabulary(harmony: HarmonyFormat) -> HarmonyVocabulary:
    return harmony.vocabulary


@pytest.fixture(scope="session")
def library() -> HarmonyEncoding:
    """openai-harmony's own renderer: the reference where it is right."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(find_ranks_file().parent))
        return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
