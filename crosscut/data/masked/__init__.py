"""Samples for masked language modelling: pairs of segments or packed documents, with some of their words masked."""
