"""Samples for masked language modelling: pairs of segments or packed documents in which some words are masked."""
