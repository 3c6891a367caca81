"""Script form of `trainer run`, for launchers that need a file instead of a module.

deepspeed --num_accelerators 2 launchers/train.py bert_sample
torchrun --standalone --nproc-per-node 2 launchers/train.py bert_sample
"""

import sys

from trainer.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
