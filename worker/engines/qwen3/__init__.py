"""Qwen3-ASR: the production engine. ``engine.Qwen3Engine`` is its door; importing it imports torch.

The way of a checkpoint: ``checkpoint`` finds and judges it, ``config`` reads its shape, ``weights`` its parameters, ``vocabulary``
its tokens. The way of an utterance: ``audio`` keeps samples, ``mel`` makes features, ``encoder`` makes embeddings of closed and open
windows, ``prompt`` places them between the turns, ``decoder`` continues the text over its own key/value slots, ``parse``
takes the text out of the tokens, ``guard`` ends run-aways, and ``engine`` decides which rows work in a step.
"""
