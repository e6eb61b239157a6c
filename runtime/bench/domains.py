"""Built-in prompts by domain, for figures that depend on what is decoded: acceptance of drafts above all."""

from __future__ import annotations

DOMAINS: dict[str, tuple[str, ...]] = {
    "math": (
        "<|user|>What is 4718 + 2659?<|assistant|>",
        "<|user|>Compute 23 * 47.<|assistant|>",
        "<|user|>What is 15 percent of 640?<|assistant|>",
        "<|user|>Solve for n: 4n + 7 = 31.<|assistant|>",
        "<|user|>Find the greatest common divisor of 36 and 84.<|assistant|>",
        "<|user|>A cyclist rides at 18 km per hour for 5 hours. How far does the cyclist go?<|assistant|>",
        "<|user|>Nina has 26 marbles. Otto has 3 times as many marbles as Nina. How many do they have together?"
        "<|assistant|>",
        "<|user|>Paul shares 53 nuts equally among 7 friends. How many nuts does each friend get, and how many are "
        "left over?<|assistant|>",
    ),
    "code": (
        "def moving_average(values, width):\n    total = 0.0\n    window = []\n    for value in values:\n        ",
        "class Inventory:\n    def __init__(self, items=None):\n        self.items = dict(items or {})\n\n    def add(",
        "import json\nimport os\n\n\ndef read_settings(path):\n    if not os.path.exists(path):\n        ",
        "    def __repr__(self):\n        return f'<{self.__class__.__name__} ",
        "def is_prime(n: int) -> bool:\n    if n < 2:\n        return False\n    for ",
        "    def close(self) -> None:\n        if self._closed:\n            return\n        ",
        "def flatten(nested):\n    result = []\n    for item in nested:\n        if isinstance(item, (list, tuple)):\n",
        "class ParseError(ValueError):\n    def __init__(self, message, line):\n        super().__init__(message)\n",
    ),
    "chat": (
        "<|user|>Good morning! Can you give me three tips for learning to cook?<|assistant|>",
        "<|user|>My brother likes the sea. Why?<|assistant|>",
        "<|user|>Today is Friday. Which day is it in 4 days?<|assistant|>",
        "<|user|>Can you tell me something about an old bridge?<|assistant|>",
        "<|user|>Which city is the capital of Portugal?<|assistant|>",
        "<|user|>I want to get better at chess. Any tips?<|assistant|>",
        "<|user|>Please explain to me in simple words what a river is.<|assistant|>",
        "<|user|>Hello! What do you think about long walks in the forest?<|assistant|>",
    ),
}
