"""Every API family that is served, and those that a batch may be of."""

from ingress.family import Family
from ingress.routes.chat import Chat
from ingress.routes.completions import Completions
from ingress.routes.embeddings import Embeddings
from ingress.routes.infer import Infer
from ingress.routes.messages import CountTokens, Messages
from ingress.routes.responses import Responses

_chat, _completions, _responses, _embeddings = Chat(), Completions(), Responses(), Embeddings()
FAMILIES: tuple[Family, ...] = (_chat, _completions, Infer(), Messages(), CountTokens(), _responses, _embeddings)
BATCHED: dict[str, Family] = {family.route: family for family in (_chat, _completions, _responses, _embeddings)}
