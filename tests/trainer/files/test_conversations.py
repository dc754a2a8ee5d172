"""Lines of conversations are checked one by one, and written as a prompt format says."""

import json

import pytest

from megatron.trainer.files.conversations import PROMPT_FORMATS, read
from tests.trainer.data.small_chats import write_chats

CHAT = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "1+1? /no_think"},
    {"role": "assistant", "content": " 2\n"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]
WRITTEN = {
    "nemotron-h-aligned": [
        ("<SPECIAL_10>System\nBe brief.\n<SPECIAL_11>User\n1+1? /no_think\n<SPECIAL_11>Assistant\n", False),
        ("2\n", True),
        ("<SPECIAL_11>User\n2+2?\n<SPECIAL_11>Assistant\n", False),
        ("4\n", True),
    ],
    "nemotron-nano-v2": [
        ("<SPECIAL_10>System\nBe brief.\n<SPECIAL_11>User\n1+1?\n<SPECIAL_11>Assistant\n", False),
        ("2\n<SPECIAL_12>\n", True),
        ("<SPECIAL_11>User\n2+2?\n<SPECIAL_11>Assistant\n", False),
        ("4\n<SPECIAL_12>\n", True),
    ],
    "chatml": [
        ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1? /no_think<|im_end|>\n<|im_start|>assistant\n",
         False),
        ("2<|im_end|>\n", True),
        ("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n", False),
        ("4<|im_end|>\n", True),
    ],
    "llama3": [
        ("<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user"
         "<|end_header_id|>\n\n1+1? /no_think<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", False),
        ("2<|eot_id|>", True),
        ("<|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
         False),
        ("4<|eot_id|>", True),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", PROMPT_FORMATS)
def test_a_format_tells_answers_from_the_rest(tmp_path, name):
    """Only answers, and what ends them, are learned; a line's further conversations begin with a system message."""
    [[first, second]] = read(write_chats(tmp_path / "chats.jsonl", [[*CHAT, *CHAT]]))
    assert first == second == [(each["role"], each["content"]) for each in CHAT]
    assert [*PROMPT_FORMATS[name].texts(first)] == WRITTEN[name]


QUESTION = {"role": "user", "content": "Why?"}
WRONG = {
    '{"messages": [}': "is not JSON",
    '{"conversations": []}': "has no messages; write lines such as",
    '{"messages": [{"from": "human", "value": "Why?"}]}': "message 1 has the role None, which no prompt format writes",
    json.dumps({"messages": [{"role": "user", "content": ["Why?"]}]}): "has the content ['Why?'], which is no text",
    json.dumps({"messages": [{"role": "assistant", "content": "So."}]}): "message 1 is an answer, and none of a user",
    json.dumps({"messages": [QUESTION, {"role": "assistant", "content": " "}]}): "message 2 is an empty answer",
}


@pytest.mark.parametrize(("line", "reason"), WRONG.items())
def test_what_is_no_conversation_is_named_by_its_line(tmp_path, line, reason):
    path = tmp_path / "chats.jsonl"
    path.write_text(f'{{"messages": [{json.dumps(QUESTION)}]}}\n\n{line}\n')
    with pytest.raises(ValueError) as refused:
        read(str(path))
    assert str(refused.value).startswith(f"{path}, line 3") and reason in str(refused.value)


def test_a_file_without_conversations_is_refused(tmp_path):
    (tmp_path / "chats.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="has no conversations; write lines such as"):
        read(str(tmp_path / "chats.jsonl"))
