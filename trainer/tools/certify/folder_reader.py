"""Open an exported folder as any user would, and write the outputs of its model.

Another process runs this file as a script: `python folder_reader.py FOLDER_OF_A_REQUEST`. It must not import this
project. The request is `request.json` with rows beside it: `inputs-0.npz` and so on. If it is not transformers that
opens the folder, `opener.py` beside it does. The reply is `reply.json` and `outputs-0.npz` and so on.
"""

import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from runpy import run_path
from typing import Any

import numpy as np


def _open_model(request: dict[str, Any], reply: dict[str, Any]) -> Any:
    """Return a function from the inputs of a batch, arrays by name, to the outputs of the model."""
    import torch
    import transformers

    auto = getattr(transformers, request["auto_class"])
    if request["base"] is not None:
        from peft import PeftModel

        keys = {"revision": request["revision"]}
        config = transformers.AutoConfig.from_pretrained(request["folder"])
        of_base = transformers.AutoConfig.from_pretrained(request["base"], **keys)
        # A base that is stored quantised keeps its format; else, transformers quantises it while it loads.
        if hasattr(of_base, "quantization_config"):
            config.quantization_config = of_base.quantization_config
        elif request["quantization"]:
            keys["quantization_config"] = request["quantization"]
        base = auto.from_pretrained(request["base"], **keys, config=config, dtype=torch.float32, device_map="cpu")
        # The comparison needs the numbers of fp32.
        for module in base.modules():  # for evaluations, bitsandbytes would round scales to bf16
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False
        model = PeftModel.from_pretrained(base, request["folder"])
    else:
        model, loading = auto.from_pretrained(request["folder"], dtype=torch.float32, output_loading_info=True)
        reply["lost"] = sorted(loading["missing_keys"])
    model.eval()

    def outputs(inputs: dict[str, Any]) -> dict[str, Any]:
        with torch.no_grad():
            found = model(**{name: torch.from_numpy(inputs[name]) for name in request["inputs"]})
        return {name: found[name].float().numpy() for name in request["outputs"] if found.get(name) is not None}

    return outputs


def tokens_of(tokenizer: Any, texts: list[Any]) -> dict[str, Any]:
    """Return the token ids of texts and pairs, the chat template, and the special tokens."""
    special = {name: getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id", "bos_token_id")}
    return {
        "ids": [list(map(int, tokenizer(*text)["input_ids"])) for text in texts],
        "template": tokenizer.chat_template,
        "special": special,
    }


def batches(folder: Path, request: dict[str, Any]) -> Any:
    """Yield the inputs of each batch; rows that are not texts are prepared by the folder's own processor."""
    processor = None
    if named := request["processor"]:
        import transformers

        processor = getattr(transformers, named["name"]).from_pretrained(request["folder"])
    for number in range(request["num_batches"]):
        with np.load(folder / f"inputs-{number}.npz") as stored:
            inputs = dict(stored)
        if processor is not None:
            prepared = processor(list(inputs.values()), **named["options"], return_tensors="np")
            inputs = {name: np.asarray(prepared[name], np.float32) for name in named["inputs"]}
        yield inputs


def main(folder: Path) -> None:
    """Answer the request in a folder."""
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    from transformers import AutoConfig

    reply: dict[str, Any] = {"lost": [], "labels": AutoConfig.from_pretrained(request["folder"]).id2label}
    if request["texts"]:
        from transformers import AutoTokenizer

        reply["tokens"] = tokens_of(AutoTokenizer.from_pretrained(request["folder"]), request["texts"])
    opener = folder / "opener.py"
    # A module of any name could hide another on the path of Python.
    computed = run_path(str(opener))["open_folder"](request) if opener.exists() else _open_model(request, reply)
    for number, inputs in enumerate(batches(folder, request)):
        np.savez(folder / f"outputs-{number}.npz", **computed(inputs))
    reply["versions"] = {"python": platform.python_version()} | {name: version(name) for name in request["packages"]}
    (folder / "reply.json").write_text(json.dumps(reply), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    assert not any(name.partition(".")[0] == "trainer" for name in sys.modules), "another program opens the folder"
