"""SimCSE without labels: the same text twice, dropout as the only difference. The baseline of the other methods.

    accelerate launch examples/run_simcse.py --train_file my_sentences.txt --output_dir my-model

Without arguments it trains the small backbone of this repository on the documentation of this Python installation.
The published settings for BERT-base: --config examples/configs/simcse-bert-base.yaml
"""

from pathlib import Path

from common import main

if __name__ == "__main__":
    main("SimCSE", Path(__file__).parent / "configs" / "simcse-tiny.yaml", __doc__)
