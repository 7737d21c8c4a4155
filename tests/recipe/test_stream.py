"""recipe.stream: utterances and pauses, one after the other."""

import numpy as np
import pytest
import soundfile

RATE = 8000


@pytest.fixture
def folder(tmp_path):
    """A set of two utterances; one begins with digital silence, one has a soft hum."""
    rng = np.random.default_rng(0)
    loud = rng.uniform(-0.5, 0.5, RATE)
    loud[: RATE // 2] = 0.0
    soundfile.write(tmp_path / "loud.wav", loud, RATE)
    hum = 0.01 * np.sin(2 * np.pi * 200 * np.arange(RATE // 2) / RATE)
    soundfile.write(tmp_path / "soft.wav", hum, RATE)
    names = ("loud", "soft")
    (tmp_path / "wav.scp").write_text(
        "".join(f"{name} {tmp_path}/{name}.wav\n" for name in names)
    )
    (tmp_path / "text").write_text("loud ONE TWO\nsoft THREE\n")
    return tmp_path


@pytest.fixture
def make(local, folder):
    def stream(seconds, pause=(0.5, 1.0), seed=0):
        module = local("stream")
        return module.Stream(module.read_set(folder, RATE), RATE, seconds, pause, seed)

    return stream


def test_goes_on_until_it_is_long_enough(make):
    stream = make(20.0)

    pieces = list(stream)

    length = sum(map(len, pieces)) / RATE
    assert 20.0 <= length < 22.0
    speech, pauses = pieces[::2], pieces[1::2]
    assert {len(piece) for piece in speech} == {RATE, RATE // 2}
    assert all(0.5 * RATE <= len(piece) <= RATE for piece in pauses)
    assert len({len(piece) for piece in pauses}) > 5
    assert stream.texts == [
        "ONE TWO" if len(piece) == RATE else "THREE" for piece in speech
    ]
    # each comes once before one comes again
    assert all(
        {len(first), len(second)} == {RATE, RATE // 2}
        for first, second in zip(speech[::2], speech[1::2], strict=False)
    )
    assert all(piece.dtype == np.float32 for piece in pieces)


def test_a_pause_sounds_as_the_quietest_part_before_it(make):
    pieces = list(make(10.0))

    for speech, pause in zip(pieces[::2], pieces[1::2], strict=True):
        if len(speech) == RATE:
            assert not pause.any()
        else:
            assert 0.7 < pause.std() / speech.std() < 1.4
            spectrum = np.abs(np.fft.rfft(pause))
            peak = spectrum.argmax() / len(pause) * RATE
            assert abs(peak - 200) < 50
            assert np.median(spectrum) < 0.05 * spectrum.max()


def test_the_seed_decides_order_and_pauses(make):
    def lengths(seed):
        return [len(piece) for piece in make(10.0, seed=seed)]

    stream = make(10.0)
    assert [len(piece) for piece in stream] == [len(piece) for piece in stream]
    assert lengths(0) == lengths(0) != lengths(1)


@pytest.mark.parametrize("lengths", [[3, 7, 1, 0, 25, 4], [10, 10], [2], [30]])
def test_regrouping_changes_nothing_but_the_cuts(local, lengths):
    audio = np.arange(sum(lengths), dtype=np.float32)
    pieces = np.split(audio, np.cumsum(lengths)[:-1])

    chunks = list(local("stream").regroup(pieces, 5))

    np.testing.assert_array_equal(np.concatenate(chunks), audio)
    assert {len(chunk) for chunk in chunks[:-1]} <= {5}
    assert len(chunks[-1]) == len(audio) % 5


def test_an_empty_stream_is_an_error(local, folder):
    stream = local("stream")

    with pytest.raises(stream.RecipeError, match="the stream is empty"):
        list(stream.regroup([], 5))

    (folder / "wav.scp").write_text("")
    with pytest.raises(stream.RecipeError, match=r"wav\.scp has no utterances"):
        stream.read_set(folder, RATE)


def test_names_what_is_wrong_with_a_set(local, folder):
    stream = local("stream")

    with pytest.raises(stream.RecipeError, match="loud is at 8000 Hz, not 16000 Hz"):
        stream.read_set(folder, 16000)

    (folder / "text").write_text("loud ONE TWO\n")
    with pytest.raises(stream.RecipeError, match=r"soft has no line in .*text"):
        stream.read_set(folder, RATE)

    (folder / "text").unlink()
    with pytest.raises(stream.RecipeError, match="text is missing; stage 1 makes it"):
        stream.read_set(folder, RATE)
