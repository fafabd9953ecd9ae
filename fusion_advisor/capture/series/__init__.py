"""Convolutions of series: takes a captured graph, returns it with some of them as convolutions of images, or as they were."""
