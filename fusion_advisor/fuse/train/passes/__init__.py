"""Both passes of a training step as AOTAutograd parts them: how they are cut out, and in which ops each is written."""
