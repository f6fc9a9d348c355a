"""VaSCL: dropout views plus a virtual augmentation inside the nearest in-batch neighbours.

Small backbone, the documentation of this Python installation as texts; no download, a few minutes on two cores:

    accelerate launch examples/run_vascl.py

Your own sentences, one a line, with the paper's settings for DistilRoBERTa:

    accelerate launch examples/run_vascl.py --config examples/configs/vascl-distilroberta.yaml \
        --train_file my_sentences.txt --output_dir my-model

The best checkpoint by STS-B dev Spearman, as in the paper: --eval_sts_file sentence-transformers/stsb
The SimCSE loss alone: --neighborhood_weight 0
"""

from pathlib import Path

from common import main

if __name__ == "__main__":
    main("VaSCL", Path(__file__).parent / "configs" / "vascl-tiny.yaml", __doc__)
