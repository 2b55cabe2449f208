"""A study on paper and on screen: the verdict in words, the table of the front, the figures, the HTML report.

Everything is made from a `StudyView` and the tables in the study's folder; nothing here starts an engine or talks to
MLflow. `verdict` makes the sentences, `table` the rows, `charts` and `importance` the figures as plain data, `plotly`
and `still` draw that data for screen and paper, `html` puts it all on one page.
"""
