"""Speech and sound."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .job import job
from .language import HF, own_loss, tokens
from .ways import Steps, Way


@job("Whisper", needs=HF)
def whisper(way: Way) -> Steps:
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=128, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, num_mel_bins=20, max_source_positions=50,
        max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    batches = [{"input_features": torch.randn(4, 20, 100), "labels": tokens(4, 16)} for _ in range(3)]
    return way.train(transformers.WhisperForConditionalGeneration(config), own_loss, batches)


@job("wav2vec 2.0 with CTC, masks in time and dropouts", needs=HF)
def wav2vec2(way: Way) -> Steps:
    import transformers

    config = transformers.Wav2Vec2Config(
        vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, mask_time_length=4,
    )  # fmt: skip
    batches = [{"input_values": torch.randn(2, 2000), "labels": torch.randint(1, 32, (2, 8))} for _ in range(3)]
    return way.train(transformers.Wav2Vec2ForCTC(config), own_loss, batches)


class Listener(nn.Module):
    """A convolution and a recurrent layer that goes both ways, over frames."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(20, 32, 3, 2, 1)
        self.recurrent = kind(32, 32, bidirectional=True, batch_first=True)
        self.head = nn.Linear(64, 12)

    def forward(self, sound: Tensor) -> Tensor:
        return self.head(self.recurrent(self.convolution(sound).relu().mT)[0]).log_softmax(-1)


def ctc(model: nn.Module, sound: Tensor, text: Tensor) -> Tensor:
    """CTC loss, of frames that are all there."""
    logs = model(sound)
    frames, letters = torch.full((len(sound),), logs.shape[1]), torch.full((len(text),), text.shape[1])
    return F.ctc_loss(logs.transpose(0, 1), text, frames, letters)


def spoken(frames: int = 16, steps: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Sounds of so many frames, and what is said in them."""
    return [(torch.randn(4, 20, frames), torch.randint(1, 12, (4, 3))) for _ in range(steps)]


@job("CTC with a GRU that goes both ways")
def ctc_gru(way: Way) -> Steps:
    return way.train(Listener(nn.GRU), ctc, spoken())


@job("CTC with an LSTM that goes both ways")
def ctc_lstm(way: Way) -> Steps:
    return way.train(Listener(nn.LSTM), ctc, spoken())


class Conformer(nn.Module):
    """A block of a Conformer: half a feed-forward net, attention, a convolution over time, the other half."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.before, self.after = self._half(width), self._half(width)
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)
        self.convolution = nn.Sequential(
            nn.Conv1d(width, 2 * width, 1), nn.GLU(1), nn.Conv1d(width, width, 7, padding=3, groups=width),
            nn.BatchNorm1d(width), nn.SiLU(), nn.Conv1d(width, width, 1), nn.Dropout(0.1),
        )  # fmt: skip
        self.last = nn.LayerNorm(width)

    @staticmethod
    def _half(width: int) -> nn.Module:
        return nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Dropout(0.1), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.before(x)
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.convolution(x.mT).mT
        return self.last(x + 0.5 * self.after(x))


@job("Conformer on spectrograms of the sound, with CTC and dropouts", deep=16)
def conformer(way: Way, layers: int = 2) -> Steps:
    class Listening(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("window", torch.hann_window(64))
            self.into, self.blocks = nn.Linear(33, 32), nn.Sequential(*(Conformer() for _ in range(layers)))
            self.head = nn.Linear(32, 12)

        def forward(self, sound: Tensor) -> Tensor:
            spectrum = torch.stft(sound, 64, 32, window=self.window, return_complex=True).abs().add(1e-5).log()
            return self.head(self.blocks(self.into(spectrum.mT))).log_softmax(-1)

    batches = [(torch.randn(3, 1024), torch.randint(1, 12, (3, 4))) for _ in range(3)]
    return way.train(Listening(), ctc, batches)
