"""Tables, sentences and pictures from results; measures nothing."""
