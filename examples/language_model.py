"""A language model that chooses among options: calibrated from its logits, or from what a server returns.

The model is a small GPT-2 with random weights, trained on toy questions; a pretrained one is read in the same way.
"""

import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import doublehead as dh

torch.manual_seed(0)
TOKENS = [*"ABCD", *(f"word{i}" for i in range(36))]
config = GPT2Config(
    vocab_size=40, n_positions=4, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
)
network = GPT2LMHeadModel(config)
questions = torch.randint(4, 40, (2000, 3))
answers = (questions[:, -1] + (torch.rand(2000) < 0.3)) % 4  # three in ten are off by one
optimizer = torch.optim.Adam(network.parameters(), 0.01)
for _ in range(60):
    optimizer.zero_grad()
    F.cross_entropy(network(questions[:300]).logits[:, -1], answers[:300]).backward()
    optimizer.step()
network.eval()
# The model at hand: logits of the four letters as the next token.
data = questions[300:1000], answers[300:1000]
model = dh.calibrate(network, data, logits_of=lambda output: output.logits[:, -1, :4])
with torch.no_grad():
    raw, calibrated = network(questions[1000:]).logits[:, -1], model(questions[1000:]).logits
for name, logits in (("network alone", raw[:, :4]), ("calibrated", calibrated)):
    print(f"{name:14s} NLL {dh.metrics.nll(dh.Predictions(logits, answers[1000:])):.3f}")

# A model behind a server: the likeliest tokens with their log-probabilities, one dict for each question.
top = raw.log_softmax(1).topk(5)
records = [{TOKENS[i]: v for v, i in zip(*row)} for row in zip(top.values.tolist(), top.indices.tolist())]
p = dh.Predictions.from_logprobs(records, [TOKENS[i] for i in answers[1000:]], options=TOKENS[:4])
calibrator = dh.calibrate(p[:500])
for name, part in (("server alone", p[500:]), ("calibrated", calibrator.calibrate(p[500:]))):
    print(f"{name:14s} NLL {dh.metrics.nll(part):.3f}")
