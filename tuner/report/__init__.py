"""A study on paper and on screen: the verdict in words, the table of the front, the figures, the HTML report.

Everything is made from a `StudyView` and the tables in the study's folder; nothing here starts an engine or talks to
MLflow. `verdict` makes the sentences, `table` the rows; `charts`, `charts_of_tables`, `parallel` and `importance` make
the figures as plain data, which `interactive` and `still` draw for screen and paper; `html` puts it all on one page.
"""
